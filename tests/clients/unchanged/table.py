"""The clients that run unchanged: packages and versions, the lines of their configuration, scripts.

Values only, and what docs/clients.md says of each. A client's configuration is the first block of
code below its heading there; scripts/ has a script a client, which begins with that block.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PAGE = ROOT / "docs" / "clients.md"
# Where the page's block goes, by the language it is written in.
FILES = {
    "python": "configuration.py",
    "javascript": "configuration.mjs",
    "toml": "config.toml",
    "json": "opencode.json",
    "yaml": "models.yaml",
    "bash": "configuration.sh",
}
URL, MODEL = "http://127.0.0.1:8000", "streamer-demo"


class Client(msgspec.Struct, frozen=True):
    """A client.

    name      of its environment and script
    heading   in docs/clients.md
    packages  with versions: of npm with an @ before it, of PyPI with ==
    script    its file in scripts/
    answers   the fake model's answers, a file in scripts/
    after     what npm's packages run with Node once they are installed
    """

    name: str
    heading: str
    packages: tuple[str, ...]
    script: str
    answers: str = "answers.json"
    after: str = ""

    @property
    def is_js(self) -> bool:
        """Whether its packages are npm's."""
        return "==" not in self.packages[0]

    @property
    def version(self) -> str:
        """Of its first package."""
        return self.packages[0].replace("==", "@").rpartition("@")[2]


CLAUDE, CODEX, OPENCODE = "@anthropic-ai/claude-code", "@openai/codex", "opencode-ai"

CLIENTS = (
    Client("openai", "OpenAI's Python package", ("openai[realtime]==3.54.0",), "openai_python.py"),
    Client(
        "openai-js",
        "OpenAI's package for JS",
        ("openai@7.57.0", "ws@8.23.0", "zod@4.6.7"),
        "openai_js.mjs",
    ),
    Client("agents", "OpenAI's Agents SDK", ("openai-agents==0.24.0",), "agents_sdk.py"),
    Client("anthropic", "Anthropic's package", ("anthropic==2.12.0",), "anthropic_python.py"),
    Client(
        "anthropic-js",
        "Anthropic's package for JS",
        ("@anthropic-ai/sdk@1.12.0", "zod@4.6.7"),
        "anthropic_js.mjs",
    ),
    Client(
        "langchain",
        "LangChain",
        (
            "langchain-openai==1.7.3",
            "langchain-anthropic==1.7.7",
            "langchain-ollama==1.1.0",
            "langchain==1.4.7",
        ),
        "lang_chain.py",
    ),
    Client(
        "llama-index", "LlamaIndex", ("llama-index-llms-openai-like==0.8.1",), "llama_index_llm.py"
    ),
    Client(
        "pydantic-ai",
        "pydantic-ai",
        ("pydantic-ai-slim[openai,anthropic]==2.66.0",),
        "pydantic_agent.py",
    ),
    Client("instructor", "instructor", ("instructor==1.17.0",), "instructor_models.py"),
    Client("litellm", "litellm", ("litellm==1.83.0",), "lite_llm.py"),
    Client(
        "ai-sdk",
        "Vercel's AI SDK",
        ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/openai@4.0.118", "zod@4.6.7"),
        "ai_sdk.mjs",
    ),
    Client("llm", "llm", ("llm==0.36",), "llm_program.py"),
    Client("ollama", "Ollama's package", ("ollama==0.6.3",), "ollama_python.py"),
    Client("ollama-js", "Ollama's package for JS", ("ollama@0.6.4",), "ollama_js.mjs"),
    Client("codex", "Codex CLI", (f"{CODEX}@0.169.0",), "codex.py", "codex.json"),
    Client(
        "claude-code",
        "Claude Code",
        (f"{CLAUDE}@2.1.330",),
        "claude_code.py",
        "claude_code.json",
        f"{CLAUDE}/install.cjs",
    ),
    Client(
        "opencode",
        "opencode",
        (f"{OPENCODE}@1.18.33",),
        "opencode.py",
        "opencode.json",
        f"{OPENCODE}/postinstall.mjs",
    ),
)
BY_NAME = {client.name: client for client in CLIENTS}


def configuration(client: Client) -> tuple[str, str]:
    """The language and text of its configuration in docs/clients.md."""
    page = PAGE.read_text(encoding="utf-8")
    _, found, section = page.partition(f"\n## {client.heading}\n")
    section = section.partition("\n## ")[0]
    block = re.search(r"^```(\w+)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    if not found or block is None:
        raise LookupError(f"docs/clients.md has no configuration of {client.heading}")
    return block[1], block[2]


def configured(client: Client, url: str, model: str) -> tuple[str, str]:
    """File name and text of its configuration, for this server and model."""
    language, text = configuration(client)
    text = text.replace(URL, url).replace(MODEL, model)
    if language == "javascript":
        names = re.findall(r"^const (\w+) =", text, re.MULTILINE)
        text += f"export {{ {', '.join(names)} }};\n"
    return FILES[language], text
