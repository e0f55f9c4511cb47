"""Facts in vLLM's fields: each survives the way, and one file names the fields."""

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.spec_decode.metrics import SpecDecodingStats
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from dllm_plugin.config import carriers, worker_carriers
from dllm_plugin.config.carriers import NO_TOKEN, EndedRequest, Snapshot, StepWidth
from dllm_plugin.config.worker_carriers import FINISHED, PREEMPTED

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dllm_plugin"
SHARED = ("kv_transfer_params", "routed_experts", "num_nans", "per_step_drafted")
CARRIERS = ("carriers.py", "worker_carriers.py")
# A module and an attribute of vLLM have the name of a field.
OF_VLLM = {"engine/worker/cpu_worker.py", "models/mixtures.py"}


def sent(output: EngineCoreOutput) -> EngineCoreOutput:
    """An output as the front end gets it."""
    message = MsgpackEncoder().encode(output)
    received: EngineCoreOutput = MsgpackDecoder(EngineCoreOutput).decode(message)
    return received


def answer(output: EngineCoreOutput) -> RequestOutput:
    """What vLLM's front end makes of it, as far as it is asked for here."""
    return RequestOutput(
        "r",
        None,
        [1],
        None,
        [],
        False,
        kv_transfer_params=output.kv_transfer_params,
    )


@pytest.mark.parametrize("drafts", [None, (9, 4)])
@pytest.mark.parametrize("others", [None, {"remote_host": "a", "remote_port": 5}])
def test_a_snapshot_lies_beside_a_connectors_keys(others: Any, drafts: Any) -> None:
    output = EngineCoreOutput("0_r", [], kv_transfer_params=others)
    ids, certain = np.array([5, NO_TOKEN, 7]), np.array([0.504, 0.0, 0.0])
    carriers.pack_snapshot(output, 4, 16, 18, ids, certain, drafts)
    received = answer(sent(output))
    wanted = Snapshot("0_r", 4, 16, 18, [5, NO_TOKEN, 7], [0.5, None, None], drafts)
    assert carriers.unpack_snapshot(received) == wanted
    assert received.kv_transfer_params == others
    assert carriers.unpack_snapshot(received) is None
    assert received.kv_transfer_params == others


def test_a_trace() -> None:
    output = EngineCoreOutput("r", [1, 2])
    rows = np.array([[1, 0.5], [2, np.nan]], dtype=np.float32)
    carriers.pack_trace(output, rows)
    joined = sent(output).routed_experts
    completion = CompletionOutput(0, "", [1, 2], None, None, routed_experts=joined)
    np.testing.assert_equal(carriers.unpack_trace(completion), rows)
    assert completion.routed_experts is None
    assert carriers.unpack_trace(completion) is None


def step_results(**fields: Any) -> ModelRunnerOutput:
    index = {"a": 0, "b": 1, "c": 2}
    return ModelRunnerOutput(["a", "b", "c"], index, **fields)


def test_masks_left_and_broken_positions() -> None:
    """Broken positions win; what is left is hidden from vLLM's own metric."""
    broken, left = torch.tensor([0, 2, 0]), torch.tensor([7, 3, 0])
    packed = worker_carriers.pack_masks_left(broken, left)
    kwargs = worker_carriers.pack_broken(packed)
    output = SamplerOutput(packed, None, num_sampled=left, num_rejected=left, **kwargs)
    assert output.num_nans is packed
    counts = dict(zip("abc", packed.tolist(), strict=True))
    results = step_results(num_nans_in_logits=counts)
    assert worker_carriers.unpack_masks_left(results) == {"a": 7}
    assert results.num_nans_in_logits == {"a": 0, "b": 2, "c": 0}
    assert worker_carriers.unpack_broken(results) == {"b": 2}
    assert worker_carriers.unpack_masks_left(step_results()) == {}
    assert worker_carriers.unpack_broken(step_results()) == {}
    outputs = [EngineCoreOutput("b", []), EngineCoreOutput("c", [])]
    worker_carriers.show_broken(outputs, {"b": 2})
    assert [output.num_nans_in_logits for output in outputs] == [2, 0]


@pytest.mark.parametrize("emits", [True, False])
def test_canvas_rows(emits: bool) -> None:
    """With the log-probabilities of another request and without."""
    ids = torch.tensor([[5, NO_TOKEN], [6, 7]])
    certain = torch.tensor([[0.5, 0.0], [0.25, 1.0]])
    taken = torch.tensor([[True, False], [False, True]])
    emitted = None
    if emits:
        emitted = (torch.ones(3, 2).int(), torch.zeros(3, 2), torch.arange(1, 4))
    columns = worker_carriers.pack_canvas_rows(
        emitted, ids, certain, taken, torch.tensor([0, 2])
    )
    offsets = [0, 0, 3, 3]
    lists = LogprobsTensors(*columns, offsets).tolists()
    results = step_results(logprobs=lists)
    canvases = worker_carriers.unpack_canvas_rows(results)
    assert list(canvases) == [0, 2]
    for row, place in enumerate(canvases):
        canvas = canvases[place]
        assert canvas.ids_C.tolist() == ids[row].tolist()
        assert canvas.confidence_C.tolist() == certain[row].tolist()
        assert canvas.taken_C.tolist() == taken[row].tolist()
    if not emits:
        assert results.logprobs is None
        return
    assert results.logprobs is not None
    assert results.logprobs.sampled_token_ranks.tolist() == [1, 2, 3]
    assert results.logprobs.logprob_token_ids.shape == (3, 2)
    assert results.logprobs.cu_num_generated_tokens == offsets
    assert worker_carriers.unpack_canvas_rows(results) == {}, "nothing is left"


def test_steps_without_watched_requests_keep_their_logprobs() -> None:
    plain = LogprobsLists(*(np.ones((2, 1)), np.ones((2, 1)), np.array([1, 2])), None)
    for lists in (None, plain):
        results = step_results(logprobs=lists)
        assert worker_carriers.unpack_canvas_rows(results) == {}
        assert results.logprobs is lists


def test_reports_of_a_step() -> None:
    ended = [
        EndedRequest(FinishReason.STOP, 4, 10, 80),
        EndedRequest(FinishReason.ABORT, 0, 0, 16),
    ]
    width = StepWidth(8, 1, 0.97, 2.5, 1.25)
    for steps in ([width], []):
        stats = SpecDecodingStats(8)
        carriers.pack_reports(stats, ended, steps[0] if steps else None)
        received = MsgpackDecoder(SpecDecodingStats).decode(
            MsgpackEncoder().encode(stats)
        )
        assert carriers.unpack_reports(received) == (ended, steps)


def test_starts_of_requests() -> None:
    counts = RequestSpecDecodeMetrics.new(8)
    assert carriers.unpack_start(counts) == (0, None)
    carriers.pack_start(counts, 16, 2)
    assert carriers.unpack_start(counts) == (16, 2)
    carriers.pack_start(counts, 32, 2)
    assert carriers.unpack_start(counts) == (16, 2), "it was preempted"
    assert carriers.unpack_widths(counts) is None
    plain = RequestSpecDecodeMetrics.new(8)
    carriers.pack_start(plain, 16, None)
    assert carriers.unpack_start(plain) == (16, None)


def test_widths_of_forwards() -> None:
    counts = RequestSpecDecodeMetrics.new(8)
    carriers.pack_width(counts, 8, 0)
    carriers.pack_width(counts, 6, 5)
    assert carriers.unpack_widths(counts) == [8, 6]
    assert carriers.unpack_committed(counts) == [0, 5]


def test_departures() -> None:
    """Pages are sent once, when their request leaves."""
    output = SchedulerOutput.make_empty()
    output.finished_req_ids, output.preempted_req_ids = {"a", "b"}, {"b", "c"}
    pages = {"a": (3, 5), "z": (1,)}
    worker_carriers.pack_departures(output, pages)
    facts = {str(i): worker_carriers.unpack_id(i) for i in output.finished_req_ids}
    assert facts == {"a": (FINISHED, (3, 5)), "b": (FINISHED, ())}
    preempted = [worker_carriers.unpack_id(i) for i in output.preempted_req_ids or ()]
    assert preempted == [(PREEMPTED, ())]
    assert pages == {"z": (1,)}
    assert worker_carriers.unpack_id("a") == ("", ())


def test_positions_of_a_request() -> None:
    counts = RequestSpecDecodeMetrics.new(8)
    carriers.pack_positions(counts, 40)
    carriers.pack_positions(counts, 8)
    assert carriers.unpack_positions(counts) == 48


def test_canvases() -> None:
    """Whole rows, of which vLLM reads the emitted ids."""
    tokens = torch.arange(12).view(3, 4)
    none = torch.zeros(3)
    kwargs = worker_carriers.pack_canvases(tokens)
    output = SamplerOutput(
        **kwargs,
        logprobs_tensors=None,
        num_sampled=none,
        num_rejected=none,
        num_nans=None,
    )
    assert output.sampled_token_ids is tokens
    found = worker_carriers.unpack_canvases(tokens.numpy(), step_results(), ["c", "a"])
    assert found == {"c": [8, 9, 10, 11], "a": [0, 1, 2, 3]}


def test_ids_of_unconditional_requests() -> None:
    hidden = worker_carriers.pack_unconditional("a")
    assert hidden != "a" and worker_carriers.unpack_unconditional(hidden) == "a"
    assert worker_carriers.unpack_unconditional("a") == "a"
    is_unconditional = worker_carriers.is_unconditional
    assert is_unconditional(hidden) and not is_unconditional("a")


# Where the fields are named.


def test_no_other_file_names_the_fields() -> None:
    names = re.compile("|".join(rf"\b{name}\b" for name in SHARED))
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent != PACKAGE / "omni" and names.search(path.read_text()):
            found.add(str(path.relative_to(PACKAGE)))
    assert found == {f"config/{name}" for name in CARRIERS} | OF_VLLM


def test_no_other_file_touches_what_only_carriers_read() -> None:
    """Attributes and keywords, also of fields that have common names."""
    fields = {"num_nans_in_logits", "per_step_accepted", "num_draft_tokens_per_pos"}
    for path in PACKAGE.rglob("*.py"):
        if path.name in CARRIERS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", getattr(node, "arg", None))
            assert name not in fields, f"{path}: {name}"


def rows_of_the_table() -> list[list[str]]:
    """Cells of the table of carriers in docs/design.md."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = text.partition("| fact | field of vLLM | packed by | unpacked by |")[2]
    rows = []
    for line in table.strip().splitlines()[1:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_the_table_of_the_design_is_true() -> None:
    """Every pair stands in it, with the fields that its functions touch."""
    functions = {}
    for file in CARRIERS:
        tree = ast.parse((PACKAGE / "config" / file).read_text())
        functions |= {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    listed = set()
    for _, fields, packed, unpacked in rows_of_the_table():
        pair = re.findall(r"`(\w+)`", packed) + re.findall(r"`(\w+)`", unpacked)
        listed |= set(pair)
        source = "".join(ast.unparse(functions[name]) for name in pair)
        for field in re.findall(r"`(\w+)(?:\[[^`]*\])?`", fields):
            assert field in source, (field, pair)
    pairs = {name for name in functions if name.startswith(("pack_", "unpack_"))}
    assert listed == pairs
    for name in pairs - {"pack_departures"}:  # which packs several ids
        if name.startswith("pack_"):
            assert any(other.startswith(f"un{name}") for other in pairs), name


def private_writes(tree: ast.Module) -> set[str]:
    """Private attributes of other objects than `self` that a module sets, or changes in place."""
    places: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.Delete)):
            places += node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            places.append(node.target)
    written = set()
    while places:
        place = places.pop()
        if isinstance(place, (ast.Tuple, ast.List)):
            places += place.elts
        elif isinstance(place, ast.Subscript):
            places.append(place.value)
        elif isinstance(place, ast.Attribute) and ast.unparse(place.value) != "self":
            written.add(place.attr)
    return {name for name in written if re.match(r"_[a-z]", name)}


# Of a copy of a request, which vLLM never sees.
OF_COPIES = {"_all_token_ids"}


def test_the_design_names_private_attributes_that_are_written() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    text = text.partition("Written without a public way")[2].partition("\n## ")[0]
    found = set()
    for path in PACKAGE.rglob("*.py"):
        written = private_writes(ast.parse(path.read_text(encoding="utf-8")))
        found |= written
        name = path.relative_to(PACKAGE).as_posix()
        assert not written - OF_COPIES or f"`{name}`" in text, name
    named = set(re.findall(r"\b_[a-z]\w*\b", text))
    # A slice of the scheduler's own list is deleted through `self`.
    assert found - OF_COPIES == named - {"_spec_token_placeholders"}
