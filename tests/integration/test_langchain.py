"""LangChain's standard suite for chat models, which nobody here wrote: its ChatOpenAI, pointed at a real daemon."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from tests.integration.serving import Served, serve

KEY = "lang-0123456789abcdef"


@pytest.fixture(scope="module")
def house(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = f"""
[model]
path = {json.dumps(str(demo_model))}
alias = "demo"
ctx = 2048
parallel = 2
[cache]
hot = "128MiB"
warm = "256MiB"
"""
    with serve(tmp_path_factory.mktemp("langchain"), config, KEY) as served:
        yield served


class TestChatModel(ChatModelIntegrationTests):
    """Everything that the suite asks of a model with tools and structured output."""

    url: ClassVar[str] = ""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _served(cls, house: Served) -> None:
        cls.url = house.url

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "demo",
            "base_url": f"{self.url}/v1",
            "api_key": KEY,
            "temperature": 0,
            "max_tokens": 200,
            "max_retries": 0,
            "stream_usage": True,
        }

    @property
    def supports_json_mode(self) -> bool:
        return True
