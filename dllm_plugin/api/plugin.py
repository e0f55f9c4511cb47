"""Attach our routes to vLLM's server (entry point group ``vllm.endpoint_plugins``)."""

from argparse import Namespace
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import State
from vllm.engine.protocol import EngineClient

from dllm_plugin.config.decode import get_decode_config, is_ours
from dllm_plugin.decoding.families import FAMILIES, Family

from . import infilling, output_processor, viewer
from . import likelihood as likelihood_route
from .answers import Endpoints
from .body_checks import BodyChecks
from .routes import router


class EndpointPlugin:
    """Add routes; vLLM loads it only if ``VLLM_PLUGINS`` names it."""

    name = "diffuplug_api"
    required_tasks: tuple[Any, ...] | None = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Put our routes before vLLM's of the same paths, and our checks before all."""
        app.add_middleware(BodyChecks)
        app.include_router(router)
        app.include_router(infilling.router)
        app.include_router(likelihood_route.router)
        app.include_router(viewer.router)

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        """Keep what the routes need; nothing if the served model is not ours."""
        state.diffuplug = None
        if engine_client is None:
            return
        config = engine_client.vllm_config
        if config.model_config.architecture in FAMILIES and is_ours(config):
            output_processor.install(engine_client)
            give_template_defaults(state, FAMILIES[config.model_config.architecture])
            tracing = await engine_client.is_tracing_enabled()
            state.diffuplug = Endpoints(
                engine_client, get_decode_config(config), tracing
            )


def give_template_defaults(state: State, family: Family) -> None:
    """Give a family's template defaults to handlers, whose reasoning parsers read them.

    Prompts have them already. What the server was started with stays.
    """
    defaults = dict(family.template_defaults)
    if not defaults:
        return
    for handler in (
        state.openai_serving_chat,
        state.openai_serving_chat_batch,
        state.anthropic_serving_messages,
    ):
        given = handler.default_chat_template_kwargs
        handler.default_chat_template_kwargs = defaults | given
    responses = state.openai_serving_responses
    responses.chat_template_kwargs = defaults | responses.chat_template_kwargs
