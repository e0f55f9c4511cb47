"""Run non-autoregressive models: one tensor per request, no logits, no sampling and no KV cache.

A step calls the model's entry point: the first of ``sample``, ``forward`` and ``diffuse`` that it
has at load. Its keyword arguments are vLLM's inputs over all tokens of the step (``input_ids``,
``positions``, ``intermediate_tensors``, ``inputs_embeds``) and ``condition``, a list of
:class:`Condition`. It returns a tensor of any dtype and shape for each, as a list or stacked.
"""

import zlib
from collections.abc import Hashable, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.pooler import Pooler, PoolingParamsUpdate
from vllm.tasks import PoolingTask

from . import Runner, refusal, tensor_args

TASK: Literal["plugin"] = "plugin"


@dataclass(frozen=True)
class Condition:
    """Store the arguments of one request.

    params  ``PoolingParams.extra_kwargs``; their meaning is the model's
    span    the request's prompt: rows ``[start, end)`` of the step's inputs
    """

    req_id: str
    params: dict[str, Any]
    span: tuple[int, int]

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a generator seeded by ``seed`` or by the request's id, the same on all ranks."""
        seed = self.params.get("seed", zlib.crc32(self.req_id.encode()))
        return torch.Generator(device).manual_seed(seed)


class TensorPooler(Pooler):
    """Return what the entry point returned; vLLM calls it after the forward."""

    outputs: list[Tensor]

    def get_supported_tasks(self) -> Set[PoolingTask]:
        return {TASK, "embed"}  # model runner v2 pools only for tasks that it knows

    def get_pooling_updates(self, task: PoolingTask) -> PoolingParamsUpdate:
        return PoolingParamsUpdate()

    def forward(self, hidden_states: Tensor, pooling_metadata: Any) -> Any:
        return self.outputs


class NonARModel(nn.Module):
    """Define what DiffusionWorker asks of a model: the base class of such models."""

    is_pooling_model: ClassVar[Literal[True]] = True
    attn_type: ClassVar[str] = "encoder_only"  # a prompt is never split or cached

    def __init__(self) -> None:
        super().__init__()
        self.pooler = TensorPooler()

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        raise NotImplementedError  # vLLM wants every model to have it

    def forward(
        self, input_ids: Any = None, positions: Any = None, **inputs: Any
    ) -> Any:
        """Compute the model; no entry point unless overridden.

        Ranks before the last rank of a pipeline call it without ``condition`` and expect
        IntermediateTensors.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: start the engine with {tensor_args()}."
        )

    def check_params(self, params: dict[str, Any]) -> None:
        """Raise ValueError or TypeError with a sentence to refuse only this request."""

    def batch_key(self, condition: Condition) -> Hashable:
        """Return a key; conditions with equal keys are computed in one call, by default all."""


def entry_point(model: nn.Module) -> str:
    """Return the first of ``sample``, ``forward``, ``diffuse`` that a model has, or raise."""
    own_forward = type(model).forward not in (NonARModel.forward, nn.Module.forward)
    for name in ("sample", "forward", "diffuse"):
        if own_forward if name == "forward" else callable(getattr(model, name, None)):
            return name
    raise ValueError(
        f"{type(model).__name__} has none of sample(), forward(), diffuse()."
    )


class EntryPoint:
    """Replace the runner's model: a call runs the entry point, which may call ``forward``."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, NonARModel):
            raise ValueError(
                f"DiffusionWorker runs {NonARModel}, not {type(model)}; use ARWorker."
            )
        self.model, self.name = model, entry_point(model)
        self.conditions: list[Condition] = []  # none in a dummy run

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, **inputs: Any) -> Any:
        conditions, self.conditions = self.conditions, []
        if not get_pp_group().is_last_rank:
            return self.model(**inputs)
        self.model.pooler.outputs = self._run(conditions, inputs)
        # The hidden states that vLLM expects are read by nobody.
        tokens = inputs["positions"]
        return torch.zeros(tokens.shape[-1], 1, device=tokens.device)

    def _run(self, conditions: list[Condition], inputs: dict[str, Any]) -> list[Tensor]:
        done: dict[str, Tensor] = {}
        groups: dict[Hashable, list[Condition]] = {}
        for condition in conditions:
            seed = condition.params.get("seed", 0)
            try:
                if type(seed) is not int or not 0 <= seed < 2**63:
                    raise ValueError(
                        f"seed must be an integer from 0 to 2**63 - 1, got {seed!r}."
                    )
                self.model.check_params(condition.params)
                groups.setdefault(self.model.batch_key(condition), []).append(condition)
            except (TypeError, ValueError) as reason:
                done[condition.req_id] = refusal(str(reason))
        for group in groups.values():
            outputs = getattr(self.model, self.name)(condition=group, **inputs)
            # As many, or ValueError.
            for condition, output in zip(group, outputs, strict=True):
                done[condition.req_id] = output.detach().contiguous()
        return [done[condition.req_id] for condition in conditions]


class _Diffusion(Runner):
    """Run the entry point: what the mixins for both model runners share."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.model: Any = EntryPoint(self.model)

    def get_model(self) -> Any:
        return self.model.model if isinstance(self.model, EntryPoint) else self.model

    def get_supported_tasks(self) -> tuple[str, ...]:
        return (TASK,)

    def _dummy_pooler_run(self, hidden_states: Tensor) -> None:
        """Skip vLLM's warm-up of the pooler."""

    def _expect(self, req_ids: list[str], params: list[Any], starts: Any) -> None:
        conditions = []
        spans = pairwise(starts[: len(req_ids) + 1].tolist())
        for req_id, given, span in zip(req_ids, params, spans, strict=True):
            conditions.append(Condition(req_id, dict(given.extra_kwargs or {}), span))
        self.model.conditions = conditions


class DiffusionV1(_Diffusion):
    """Run the entry point in ``v1/worker/gpu_model_runner.py``: a mixin."""

    def _model_forward(self, **inputs: Any) -> Any:  # real steps only
        req_ids = list(self.input_batch.req_ids)
        params = [self.requests[req_id].pooling_params for req_id in req_ids]
        self._expect(req_ids, params, self.query_start_loc.np)
        return super()._model_forward(**inputs)


class DiffusionV2(_Diffusion):
    """Run the entry point in ``v1/worker/gpu/model_runner.py``: a mixin."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.pooling_runner is not None:  # the last rank of a pipeline
            self.pooling_runner.supported_tasks = frozenset({TASK})

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:  # real steps only
        batch = super().prepare_inputs(*args, **kwargs)
        if self.pooling_runner is not None:
            known = self.pooling_runner.pooling_params
            params = [known[i] for i in batch.idx_mapping_np.tolist()]
            self._expect(batch.req_ids, params, batch.query_start_loc_np)
        return batch
