"""The build backend of pyproject.toml: setuptools', and the page built into a wheel or sdist.

Node comes from PyPI where the machine has none, and only then. An sdist holds the built page, and
an editable install leaves it to `make page`. `pip install . -C page=none` goes without it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *
from setuptools.command.egg_info import manifest_maker

sys.path.insert(0, str(Path(__file__).parent))
import build_page as page

manifest_maker.template = "web/sdist.in"  # no setting does that; "MANIFEST.in" it would be
Settings = dict[str, Any] | None


def _is_wanted(settings: Settings) -> bool:
    return (page.WEB / "package.json").is_file() and (settings or {}).get("page") != "none"


def _needs(settings: Settings) -> list[str]:
    return [page.NODE_PACKAGE] if _is_wanted(settings) and page.find_node() is None else []


def _build(settings: Settings) -> None:
    if not _is_wanted(settings):
        return
    try:
        page.build()
    except page.PageError as e:
        sys.exit(f"The page could not be built: {e}\nWithout it: pip install . -C page=none")


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_needs(config_settings)]


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    return [*build_meta.get_requires_for_build_sdist(config_settings), *_needs(config_settings)]


def build_wheel(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    _build(config_settings)
    return str(build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    _build(config_settings)
    return str(build_meta.build_sdist(sdist_directory, config_settings))
