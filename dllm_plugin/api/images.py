"""Attach images and tensors of `omni` under ``/v1``, where ``--api-key`` applies."""

from argparse import Namespace
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import State
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.pooling.pooling import api_router


class ImagesPlugin:
    """Add ``/v1/pooling`` if a plugin answers; vLLM asks for no key at its own ``/pooling``."""

    name = "diffuplug_images"
    required_tasks: tuple[Any, ...] | None = ("plugin",)

    def attach_router(self, app: FastAPI) -> None:
        """Put vLLM's route under a second path."""
        app.include_router(api_router.router, prefix="/v1")

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        """Keep nothing: the handler is vLLM's."""
