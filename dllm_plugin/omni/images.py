"""Serve diffusers pipelines in the front end: read their folder, check requests, return images.

A request is a dictionary with diffusers' argument names; the engine gets its JSON as the prompt.
"""

import base64
import io
import json
from functools import cache
from pathlib import Path
from reprlib import repr as cut
from typing import Any

from PIL import Image
from transformers import PreTrainedConfig
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.plugins.io_processors.interface import IOProcessor
from vllm.transformers_utils.config import register_config_parser
from vllm.transformers_utils.config_parser_base import ConfigParserBase

from . import option, tensor_of

# Config entries that vLLM reads of every model. A prompt is bytes, hence a vocabulary of 256.
SETTINGS = {
    **{"vocab_size": 256, "max_position_embeddings": 8192, "num_hidden_layers": 0},
    **{"hidden_size": 1, "num_attention_heads": 1, "num_key_value_heads": 1},
    **{"head_dim": 1, "io_processor_plugin": "diffuplug_images"},
}
SIDE = 1024  # largest default width and height of common pipelines
COUNT = ("an integer from 1 to 9999", lambda x: type(x) is int and 0 < x < 10_000)
# Name -> what its value must be, and the test of the value.
RULES: dict[str, tuple[str, Any]] = {
    **dict.fromkeys(
        ("prompt", "negative_prompt"), ("a string", lambda x: isinstance(x, str))
    ),
    "guidance_scale": ("a number", lambda x: type(x) in (int, float)),
    "seed": (
        "an integer from 0 to 2**63 - 1",
        lambda x: type(x) is int and 0 <= x < 2**63,
    ),
    "output_type": ("'pil', 'pt' or 'latent'", lambda x: x in ("pil", "pt", "latent")),
    **dict.fromkeys(
        ("num_inference_steps", "num_images_per_prompt", "width", "height"), COUNT
    ),
}


class DiffusersConfigParser(ConfigParserBase):
    """Parse ``config_format="diffusers"``: a pipeline's folder becomes a model without layers."""

    def parse(
        self, model: str | Path, trust_remote_code: bool, *args: Any, **kwargs: Any
    ) -> Any:
        if Path(model).is_dir() and not (Path(model) / "model_index.json").is_file():
            raise ValueError(
                f"{model} has no model_index.json, so it is no diffusers pipeline."
            )
        config = PreTrainedConfig(architectures=["DiffusersPipelineModel"])
        config.update(SETTINGS)
        return config.to_dict(), config


@cache
def register() -> None:
    """Register the format, and an architecture for pipelines, which is never built."""
    ModelRegistry.register_model(
        "DiffusersPipelineModel", "dllm_plugin.omni.diffusion:NonARModel"
    )
    register_config_parser("diffusers")(DiffusersConfigParser)


def plugin() -> str:
    """Return the name of the class, which vLLM asks of IO processor plugins."""
    return "dllm_plugin.omni.images.ImageProcessor"


def check_request(request: Any, config: VllmConfig, entry: str = "") -> None:
    """Raise VLLMValidationError, with `entry` first, for a request that no pipeline can serve."""
    if not isinstance(request, dict) or "prompt" not in request:
        raise VLLMValidationError(
            f"{entry}A request is a dict with a prompt, got {cut(request)}."
        )
    for name, value in request.items():
        must, fits = RULES.get(name, ("", lambda x: True))
        if not fits(value):
            wrong = f"{entry}{name} must be {must}, got {cut(value)}."
            raise VLLMValidationError(wrong)
    limit = option(config, "max_pixels", 1 << 22)
    count = request.get("num_images_per_prompt", 1)
    pixels = count * request.get("width", SIDE) * request.get("height", SIDE)
    if pixels > limit:
        raise VLLMValidationError(
            f"{entry}{pixels} pixels ({SIDE} for a side not given) are asked for, {limit} "
            "allowed: see additional_config['omni']['max_pixels']."
        )


def picture(pixels: Any, encoded: bool) -> Any:
    """Convert uint8 ``[height, width, 3]`` to a PIL image, or to base64 of a PNG file."""
    image = Image.fromarray(pixels.numpy())
    file = io.BytesIO()
    if not encoded:
        return image
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


class ImageProcessor(IOProcessor[Any, Any]):
    """Handle ``LLM.encode({"data": request or list of them})`` and the server's ``/pooling``."""

    def parse_data(self, data: object) -> list[Any]:
        requests = data if isinstance(data, list) else [data]
        for i, request in enumerate(requests):
            check_request(
                request, self.vllm_config, f"data[{i}]: " * (len(requests) > 1)
            )
        return requests

    def pre_process(
        self, prompt: Any, request_id: str | None = None, **kwargs: Any
    ) -> list[Any]:
        return [{"prompt_token_ids": list(json.dumps(one).encode())} for one in prompt]

    def post_process(
        self, model_output: Any, request_id: str | None = None, **kwargs: Any
    ) -> Any:
        """Return each request's tensor or images; in a server (request_id given) base64 PNG."""
        found = enumerate(model_output)
        several = len(model_output) > 1
        error = VLLMValidationError
        served = request_id is not None
        tensors = [
            tensor_of(output, error, f"data[{i}]: " * several) for i, output in found
        ]
        if served and any(tensor.is_floating_point() for tensor in tensors):
            raise VLLMValidationError("output_type must be 'pil' if a server answers.")
        return [
            t if t.is_floating_point() else [picture(p, served) for p in t]
            for t in tensors
        ]
