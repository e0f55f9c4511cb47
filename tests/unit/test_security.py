"""What a request, a checkpoint or an adapter can not do."""

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.entrypoints
from fastapi import FastAPI
from safetensors.torch import load_file, save_file
from vllm.exceptions import VLLMValidationError

from dllm_plugin import default_model
from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.config.options import OPTIONS, REQUEST_FIELDS
from dllm_plugin.config.request.parsing import request_arguments
from dllm_plugin.config.validation import Text
from dllm_plugin.models.checkpoints import lora
from dllm_plugin.omni import images

PAGE = Path(__file__).parents[2] / "docs" / "operate.md"
# A decorator or call that mounts a path, in sources.
MOUNTS = re.compile(
    r"\.(?:get|post|put|patch|delete|head|websocket|api_route|add_api_route|mount)\(\s*[\"'](/[^\"']*)"
)
WRITES = """
from pathlib import Path
Path(__file__).with_name("written").touch()
raise RuntimeError("this ran")
"""


def test_no_argument_of_a_request_is_a_path() -> None:
    assert isinstance(OPTIONS["lora_path"].check, Text), "what a path's check is"
    assert not [
        name for name in REQUEST_FIELDS if isinstance(OPTIONS[name].check, Text)
    ]


@pytest.mark.parametrize(
    "name", ["tiny-llada", "tiny-dream", "tiny-sdar", "tiny-llada2.0"]
)
def test_code_of_a_checkpoint_does_not_run(
    name: str,
    checkpoint: Callable[..., Path],
    load_model: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Config, model and tokenizer name code that would leave a file behind."""
    from vllm.tokenizers import get_tokenizer

    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf")
    )
    classes = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    mapped: dict[str, Any] = {name: "modeling.Class" for name in classes}
    model = checkpoint(name, auto_map=mapped)
    (model / "modeling.py").write_text(WRITES)
    file = model / "tokenizer_config.json"
    mapped["AutoTokenizer"] = ["modeling.Class", "modeling.Class"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": mapped}))
    load_model(model)
    get_tokenizer(str(model))
    assert not list(tmp_path.rglob("written"))
    assert not [module for module in sys.modules if module.endswith(".modeling.Class")]
    assert not (tmp_path / "hf").exists()


def mounted_by_sources() -> set[str]:
    """All that vLLM's servers, its package of SageMaker's routes and ours may mount by name."""
    import model_hosting_container_standards.sagemaker.lora.routes as adapters

    import dllm_plugin.api as ours

    files = [Path(adapters.__file__)]
    for package in (vllm.entrypoints, ours):
        files += Path(package.__path__[0]).rglob("*.py")
    return {path for file in files for path in MOUNTS.findall(file.read_text())} | {
        path for path in re.findall(r'path="(/[^"]*)"', files[0].read_text())
    }


def mounted_by_an_app(*arguments: str) -> set[str]:
    """What a server without an engine has when it starts, whoever mounts it."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(list(arguments))
    app: FastAPI = build_app(args, ("generate",))
    return {route.path for route in app.routes}  # type: ignore[attr-defined]


def test_the_page_names_every_route_without_the_key() -> None:
    from vllm.entrypoints.serve.middleware.authenticate import GUARDED_PREFIX

    from_sources = mounted_by_sources()
    assert {
        "/v1/completions",
        "/tokenizer_info",
        "/collective_rpc",
        "/viewer",
    } < from_sources
    found = mounted_by_an_app()
    assert {"/v1/completions", "/metrics", "/redoc", "/invocations"} < found
    page = PAGE.read_text()
    for prefix in GUARDED_PREFIX:
        assert f"`{prefix}`" in page
    unguarded = {
        path for path in found | from_sources if not path.startswith(GUARDED_PREFIX)
    }
    # A path with a part that varies is named by what stands before it.
    missing = {path for path in unguarded if f"`{path.partition('/{')[0]}`" not in page}
    assert not missing, (
        f"name in docs/operate.md what opens them and what they do: {missing}"
    )


LONG = ("x" * 10**6, "y\n" * 1000, [0] * 10**5, {"a": "b" * 10**6}, 10**4000, 1e308)


@pytest.mark.parametrize("name", sorted(REQUEST_FIELDS))
@pytest.mark.parametrize("value", LONG, ids=lambda value: type(value).__name__)
def test_errors_repeat_no_long_values(
    name: str, value: Any, checkpoints: Path, vllm_config_for: Callable[..., Any]
) -> None:
    """As an answer and as a line of the log."""
    config = get_decode_config(vllm_config_for(checkpoints / "tiny-llada"))
    with pytest.raises(ValueError) as caught:
        request_arguments(config, {f"dllm_{name}": value}, 16)
    message = str(caught.value)
    assert name in message and len(message) < 500 and "\n" not in message


def test_nor_long_names(checkpoints: Path, vllm_config_for: Callable[..., Any]) -> None:
    config = get_decode_config(vllm_config_for(checkpoints / "tiny-llada"))
    with pytest.raises(
        ValueError, match="Unknown request argument 'dllm_nnn"
    ) as caught:
        request_arguments(config, {"dllm_" + "n" * 10**6: 1}, 16)
    assert len(str(caught.value)) < 1000
    with pytest.raises(VLLMValidationError) as refused:
        images.check_request({"prompt": "p", "width": "9" * 10**6}, None)  # type: ignore[arg-type]
    assert len(str(refused.value)) < 200


def adapter_with(folder: Path, patterns: dict[str, Any]) -> Path:
    """The bundled adapter with a rank_pattern."""
    folder.mkdir()
    for source in Path(default_model.adapter_path()).iterdir():
        (folder / source.name).write_bytes(source.read_bytes())
    file = folder / lora.CONFIG_FILE
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"rank_pattern": patterns})
    )
    return folder


def test_a_pattern_that_never_ends_is_cut_off(tmp_path: Path) -> None:
    """One that can match a name in many ways takes exponential time on one that almost matches."""
    adapter = adapter_with(tmp_path / "slow", {r"(.|\w)+(?!.)(?<!\w)": 4})
    began = time.monotonic()
    with pytest.raises(
        ValueError, match=r"rank_pattern.*longer than .* seconds"
    ) as caught:
        lora.load_adapter(adapter)
    assert time.monotonic() - began < 60
    assert lora.CONFIG_FILE in str(caught.value)


def test_a_pattern_that_is_none(tmp_path: Path) -> None:
    adapter = adapter_with(tmp_path / "wrong", {"q_proj(": 4})
    with pytest.raises(
        ValueError, match=r"rank_pattern.*'q_proj\('.*no regular expression"
    ):
        lora.load_adapter(adapter)


def test_weights_are_read_without_pickle(tmp_path: Path) -> None:
    """An adapter's file that is a pickle is refused as damaged."""
    adapter = adapter_with(tmp_path / "pickled", {})
    tensors = load_file(adapter / lora.WEIGHTS_FILE)
    (adapter / lora.WEIGHTS_FILE).unlink()
    torch.save(tensors, adapter / lora.WEIGHTS_FILE)
    with pytest.raises(ValueError, match="truncated or damaged"):
        lora.load_adapter(adapter)
    save_file(tensors, adapter / lora.WEIGHTS_FILE)
    assert lora.load_adapter(adapter).pairs
