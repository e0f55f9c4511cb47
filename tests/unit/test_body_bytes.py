"""Bodies of requests as bytes: files, encodings, and how deep lists and objects stand."""

import json
from argparse import Namespace

import pytest
from fastapi import FastAPI, UploadFile
from fastapi.testclient import TestClient
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from dllm_plugin.api.body_checks import BodyChecks, check_body
from dllm_plugin.api.routes import CHECKS


def test_files_are_no_json() -> None:
    app = FastAPI()
    app.add_middleware(BodyChecks)
    app.state.args = Namespace(log_error_stack=False)
    app.state.diffuplug = None
    init_exception_handler(app)

    @app.post("/")
    async def route(file: UploadFile) -> int:
        """Count the bytes."""
        return len(await file.read())

    @app.post("/json", dependencies=CHECKS)
    async def json_route(body: dict[str, int]) -> None:
        """Take an object."""

    with TestClient(app) as client:  # which starts and ends it, too
        reply = client.post("/", files={"file": b"RIFF\0\xff\xfe"})
        assert reply.json() == 7
        reply = client.post("/json", files={"file": b"RIFF\0\xff\xfe"})
    assert reply.status_code == 400
    said = reply.json()["error"]["message"]
    assert said == "Unsupported Media Type: Only 'application/json' is allowed"


def test_what_is_no_json_is_left_to_the_route() -> None:
    check_body(b'{"structured_outputs": ', "/")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"[" * 100_000, "more than 200 deep"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, "more than 200 deep"),
        (b'{"session_id": "\xed\xa0\xbd"}', "half of a surrogate pair"),
        (b'{"prompt": "\xff"}', "no UTF-8"),
        (
            b'{"seed": ' + b"9" * 5000 + b"}",
            "a number of more than 4300 digits: write a",
        ),
        ('{"stream_options": 1}'.encode("utf-16"), "no UTF-8"),
        ('{"stream_options": 1}'.encode("utf-32-be"), "no UTF-8"),
    ],
    ids=["lists", "objects", "surrogate", "latin", "digits", "utf-16", "utf-32"],
)
def test_refused_bytes(body: bytes, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_body(body, "/")
    assert sentence in str(caught.value)


def test_brackets_in_texts_do_not_count() -> None:
    check_body(json.dumps({"prompt": "[" * 1000 + '"{'}).encode(), "/")
    check_body(json.dumps({"prompt": [[1], [2]] * 1000}).encode(), "/")
