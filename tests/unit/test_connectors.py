"""Connectors for pages that would end an engine once it has loaded are refused before."""

from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.exceptions import VLLMValidationError

from dllm_plugin.config import scheduling

OFFLOADING, NIXL = scheduling.CONNECTORS


def transfer(name: str, **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra
    )


@pytest.mark.parametrize(
    "options",
    [
        {"kv_offloading_size": 0.05},
        {"kv_transfer_config": transfer(OFFLOADING, cpu_bytes_to_use=1 << 20)},
        {"kv_transfer_config": transfer(OFFLOADING, spec_name="TieringOffloadingSpec")},
    ],
)
def test_cpus_offload_only_by_a_spec_of_their_own(
    options: dict[str, Any], vllm_config_for: Any, checkpoints: Path
) -> None:
    with pytest.raises(ValueError, match="Spec needs a GPU: leave kv_offloading_size"):
        vllm_config_for(checkpoints / "tiny-sdar", **options)
    own = transfer(OFFLOADING, spec_name="HostCopySpec")
    vllm_config_for(checkpoints / "tiny-sdar", **options | {"kv_transfer_config": own})


def test_nixl_must_be_installed(
    vllm_config_for: Any, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"kv_transfer_config": transfer(NIXL)}
    monkeypatch.setattr(scheduling, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package nixl: .* install nixl"):
        vllm_config_for(checkpoints / "tiny-sdar", **options)
    monkeypatch.setattr(scheduling, "find_spec", lambda name: name)
    vllm_config_for(checkpoints / "tiny-sdar", **options)


PULLED = {
    "do_remote_prefill": True,
    "remote_block_ids": [[4, 7]],
    "remote_engine_id": "a",
    "remote_request_id": "b",
    "remote_host": "localhost",
    "remote_port": 5600,
    "tp_size": 1,
}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"remote_block_ids": [[4]]}, "pages hold 32 tokens, the prompt has 64"),
    ({"remote_block_ids": []}, "pages hold 0 tokens, the prompt has 64"),
    ({"remote_block_ids": "x"}, "remote_block_ids is 'x'"),
    ({"remote_block_ids": [["x", "y"]]}, "remote_block_ids is .*'x', 'y'"),
    ({"remote_block_ids": [4, 7]}, r"remote_block_ids is \[4, 7\]"),
    ({"remote_block_ids": [[4, 2**31]]}, "remote_block_ids is .*2147483648"),
    ({"remote_block_ids": [[4, -1]]}, r"remote_block_ids is .*4, -1"),
    ({"remote_block_size": 64}, "they hold remote_block_size"),
    ({"remote_host": None}, "remote_host is None"),
    ({"remote_port": "5600"}, "remote_port is '5600'"),
    ({"tp_size": "1"}, "tp_size is '1'"),
    ({"do_remote_prefill": False}, "do_remote_prefill is not set"),
]


@pytest.mark.parametrize(("changed", "reason"), WRONG)
def test_pages_that_cannot_be_pulled_are_refused(
    changed: dict[str, Any],
    reason: str,
    vllm_config_for: Any,
    checkpoints: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would end the engine."""
    monkeypatch.setattr(scheduling, "find_spec", lambda name: name)
    options = {"kv_transfer_config": transfer(NIXL)}
    config = vllm_config_for(checkpoints / "tiny-sdar", **options)
    scheduling.check_pulled_pages(config, PULLED, 64)
    scheduling.check_pulled_pages(config, {"do_remote_decode": True}, 64)
    sentence = f"^kv_transfer_params must be those of the server .*: {reason}"
    with pytest.raises(VLLMValidationError, match=sentence):
        scheduling.check_pulled_pages(config, PULLED | changed, 64)


def test_lost_pages_end_a_request(
    vllm_config_for: Any, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "find_spec", lambda name: name)
    config = transfer(NIXL)
    config.kv_load_failure_policy = "recompute"
    with pytest.raises(ValueError, match="kv_load_failure_policy 'recompute': a requ"):
        vllm_config_for(checkpoints / "tiny-sdar", kv_transfer_config=config)
