"""schemathesis, which nobody here wrote, sends what the description allows: no 500, and replies as described."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient
from scripted_backend import MODEL, MemoryAdmin, ScriptedBackend

from homeprefixd.frames.worker import Converted, DescribeTemplate, Embed, Tokenize

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.timeout(200)
async def test_every_reply_is_as_described(
    client: TestClient, backend: ScriptedBackend, admin: MemoryAdmin, tmp_path: Path
) -> None:
    admin.exported = b"a prefix"

    async def convert(_alias: str, conversion: Any) -> Converted:
        if isinstance(conversion, DescribeTemplate):
            return Converted("", "{{ messages }}", pieces=[b"<s>", b"</s>"])
        pieces = [b"x"] if isinstance(conversion, Tokenize) and conversion.with_pieces else []
        count = len(conversion.inputs) if isinstance(conversion, Embed) else 0
        return Converted("", "x", tokens=[1], pieces=pieces, vectors=[b"\0" * 8] * count)

    backend.loaded = [msgspec.structs.replace(MODEL, namespace={"salt": ""})]
    backend.convert = convert  # type: ignore[method-assign]
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("schemathesis"),
        *("run", str(client.make_url("/openapi.json")), "--checks", CHECKS, "--phases", "fuzzing"),
        *("--max-examples", "3", "--seed", "1", "--suppress-health-check", "all", "--no-color"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=tmp_path,
    )
    said = (await process.communicate())[0].decode()
    assert process.returncode == 0, said[-5000:]
    assert backend.generations, said  # else nothing got through
