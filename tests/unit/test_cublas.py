"""When cuBLAS gets no workspace: where that was measured, and nobody has said otherwise."""

import os

import pytest

from dllm_plugin.models import WORKSPACE, forgo_workspace


@pytest.mark.parametrize(
    ("capability", "was", "then"),
    [
        ((9, 0), None, ":0:0"),
        ((9, 0), ":4096:8", ":4096:8"),
        ((8, 0), None, None),
        ((10, 0), None, None),
        (None, None, None),  # a machine without a GPU
    ],
)
def test_a_process_has_one_setting(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] | None,
    was: str | None,
    then: str | None,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv(WORKSPACE, "to be put back")
    monkeypatch.delenv(WORKSPACE)
    if was is not None:
        monkeypatch.setenv(WORKSPACE, was)
    forgo_workspace(capability)
    assert os.environ.get(WORKSPACE) == then
