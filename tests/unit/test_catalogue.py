"""Check the catalogue of public checkpoints, and the memory that doctor computes."""

import math
import re
import shutil
from pathlib import Path

import pytest
from documented import ROOT
from safetensors import safe_open
from transformers import AutoConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from dllm_plugin.commands import cli, doctor, models
from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.config.memory import step_size
from dllm_plugin.decoding.families import FAMILIES
from dllm_plugin.models import ARCHITECTURES, register_configs
from dllm_plugin.models.catalogue import CHECKPOINTS, hub_name
from dllm_plugin.models.checkpoints.sizes import FOUR_BITS, layer_bytes, sizes_of

TINY = sorted((ROOT / "tests" / "goldens" / "checkpoints").iterdir())
PAGES = ROOT / "docs" / "models"


def stored_weights(folder: Path) -> int:
    """The numbers in all matrices of a checkpoint."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                shape = file.get_slice(name).get_shape()
                if len(shape) > 1:
                    count += math.prod(shape)
    return count


@pytest.mark.parametrize("folder", TINY, ids=lambda folder: folder.name)
def test_weights_are_counted_from_the_configuration(folder: Path) -> None:
    register_configs()
    sizes = sizes_of(AutoConfig.from_pretrained(folder))
    assert sizes.layers + sizes.tables == stored_weights(folder)


def test_bytes_of_quantised_layers() -> None:
    assert layer_bytes(None, 2) == 2
    assert layer_bytes("fp8_per_channel", 2) == 1
    assert layer_bytes("gptq_marlin", 2) == FOUR_BITS
    for bits, wanted in ((8, 1), (4, FOUR_BITS)):
        stored = {"config_groups": {"group_0": {"weights": {"num_bits": bits}}}}
        assert layer_bytes("compressed-tensors", 2, stored) == wanted
    odd = {"config_groups": {"W4A16": ["Linear"], "group_1": {"weights": None}}}
    assert layer_bytes("compressed-tensors", 2, odd) == 1
    groups = stored["config_groups"] | {"group_1": {"weights": {"num_bits": 8}}}
    assert layer_bytes("compressed-tensors", 2, {"config_groups": groups}) == 1
    assert layer_bytes("compressed-tensors", 2, {"config_groups": None}) == 1


def test_every_family_has_a_checkpoint() -> None:
    listed, verified = set(), set()
    for found in CHECKPOINTS.values():
        family = FAMILIES[found.architecture]
        listed.add((family.title, ARCHITECTURES[found.architecture]))
    for architecture, model in ARCHITECTURES.items():
        family = FAMILIES[architecture]
        if not family.unverified:
            verified.add((family.title, model))
    # Nobody has published an A2D from Llama.
    assert listed == verified - {("A2D", ARCHITECTURES["A2DLlamaLMHeadModel"])}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_pages_have_the_sizes_of_the_catalogue(name: str) -> None:
    """Weights within what the table rounds, and the KV cache of 1,000 tokens."""
    found = CHECKPOINTS[name]
    text = (PAGES / found.page).read_text(encoding="utf-8")
    assert found.hub.split("/")[1].removesuffix("-cpGRPO") in text
    numbers = [float(number) for number in re.findall(r"\d+\.\d+", text)]
    for size in found.gigabytes():
        assert any(abs(size - number) < 0.11 for number in numbers), size
    cached = found.kv_gigabytes()
    assert any(abs(cached - number) < 0.006 for number in numbers), cached


def test_short_names() -> None:
    assert hub_name("sdar:8b") == "JetLM/SDAR-8B-Chat"
    assert hub_name("some/model") == "some/model"
    assert hub_name("D:/models/x") == "D:/models/x"
    with pytest.raises(ValueError, match="did you mean sdar:8b"):
        hub_name("sdar:9b")


def test_a_folder_of_that_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sdar:8b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert models.resolve("sdar:8b") == "sdar:8b"


def test_the_list_and_one_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(CHECKPOINTS)]] == list(
        CHECKPOINTS
    )
    assert cli.main(["models", "sdar:8b"]) == 0
    assert "diffuplug serve sdar:8b" in capsys.readouterr().out
    assert cli.main(["models", "sdar:9b"]) == 2
    assert "did you mean sdar:8b?" in capsys.readouterr().err


def test_what_fits() -> None:
    mini = CHECKPOINTS["llada2.0:mini"]
    assert [mini.fits(gigabytes) for gigabytes in (40, 24, 12, 8)] == [
        "bf16",
        "FP8",
        "INT4",
        "no",
    ]


def test_cpus_need_weights_that_are_stored_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They quantise nothing while it loads, and have no kernels of quantised experts."""
    assert CHECKPOINTS["sdar:8b"].fits(14, gpu=False) == "FP8"
    mini = CHECKPOINTS["llada2.0:mini"]
    assert [mini.fits(gb, gpu=False) for gb in (40, 24)] == ["bf16", "no"]
    monkeypatch.setattr(models, "usable_memory", lambda: 12.0)
    for gpu in (False, True):
        monkeypatch.setattr(models, "has_gpu", lambda gpu=gpu: gpu)
        for command in (["models"], ["models", "sdar:8b"]):
            assert cli.main(command) == 0
            assert (models.OF_CPUS in capsys.readouterr().out) is not gpu


@pytest.mark.skipif(not current_platform.is_cpu(), reason="the memory of a GPU")
def test_the_list_takes_the_memory_that_vllm_takes() -> None:
    """That of a NUMA node within a container's limit, not that of the machine."""
    wanted = models.MEMORY_SHARE * current_platform.get_device_total_memory() / 1e9
    assert models.usable_memory() == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("context", "fits", "change"),
    [(4096, r"[1-9]\d* such", None), (1 << 26, "no: .* missing", "--max-model-len")],
)
def test_doctor_says_what_fits(
    context: int,
    fits: str,
    change: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From the configuration: the weights are not there."""
    source = ROOT / "tests" / "goldens" / "checkpoints" / "tiny-sdar"
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, tmp_path)
    config = (tmp_path / "config.json").read_text(encoding="utf-8")
    config = re.sub(r'(max_position_embeddings": )\d+', rf"\g<1>{context}", config)
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    assert cli.main(["doctor", str(tmp_path)]) == 0
    report = capsys.readouterr().out
    assert re.search(rf"fits: +{fits}", report), report
    assert change is None or re.search(rf"change: +{change} \d+", report), report


def test_doctor_names_no_option_that_a_cpu_refuses() -> None:
    options = EngineArgs(
        str(ROOT / "tests" / "goldens" / "checkpoints" / "tiny-sdar"),
        quantization="fp8_per_channel",
    )
    if doctor.in_eight_bits().startswith("--"):
        options.create_engine_config(UsageContext.OPENAI_API_SERVER)
    else:
        with pytest.raises(ValueError, match="needs a GPU: .*stored in 8 bits"):
            options.create_engine_config(UsageContext.OPENAI_API_SERVER)


def test_doctor_counts_what_a_rank_has() -> None:
    """Two heads of keys and values are halved by two ranks, and replicated by four."""
    register_configs()
    memory = []
    for ranks in (1, 2, 4):
        options = EngineArgs(
            str(ROOT / "tests" / "goldens" / "checkpoints" / "tiny-sdar"),
            tensor_parallel_size=ranks,
            max_model_len=128,
        )
        vllm_config = options.create_engine_config(UsageContext.OPENAI_API_SERVER)
        config = get_decode_config(vllm_config)
        memory.append(doctor.memory_of(vllm_config, config))
        size = step_size(vllm_config, config)
        assert size.shard * ranks >= size.vocab
        assert config.vocab_parallel == (ranks > 1) == (size.shard < size.vocab)
    one, two, four = memory
    assert one.request == 2 * two.request == 2 * four.request
    assert one.weights == 2 * two.weights == 4 * four.weights
