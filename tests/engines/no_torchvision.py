"""Lets SGLang be imported where torchvision is not installed, which it needs for images only.

The package index has torchvision for CUDA alone, and it would bring another torch with it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from unittest.mock import MagicMock


class _Nothing(ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in {"torchvision", "torchaudio"}:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Nothing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


def install() -> None:
    """transformers is asked first, so that it goes on without torchvision."""
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()
    import_utils.is_torchaudio_available()
    import transformers.processing_utils  # noqa: F401

    sys.meta_path.append(_Finder())
