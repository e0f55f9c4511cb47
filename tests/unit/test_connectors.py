"""Connectors for pages that would end an engine once it has loaded are refused before."""

from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig

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
