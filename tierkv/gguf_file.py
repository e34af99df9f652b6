"""Reader of GGUF files: metadata and tensors.

The metadata are parsed here, because the package `gguf` takes 5 s for a vocabulary of 49,152
tokens. Tensors are dequantized by that package.
"""

from __future__ import annotations

import importlib
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt

from tierkv.errors import ConfigError, how_to_install

Field = bool | int | float | str | list["Field"]

# Formats of `struct` by the number of a type, as the specification of GGUF gives it.
_SCALARS = dict(enumerate("BbHhIif?"))
_SCALARS |= {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


def optional(module: str, path: Path) -> ModuleType:
    """Import a module of a package that only the extra `model` of tierkv installs.

    Args:
        module: name of the module.
        path: path of the model that needs the package, for the error message.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(
            f"the model {path} needs the package {package}: {how_to_install('model')}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]  # the fastest dimension last
    type: int
    offset: int


class GGUFFile:
    """A GGUF file, open for reading. A tensor's bytes are read when the tensor is requested.

    Args:
        path: path of the file.

    Attributes:
        path: path of the file.
        fields: the metadata, by name.

    Raises:
        ConfigError: the file cannot be read, or is not a GGUF file of version 2 or 3.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._at = 0
            self._read()
        except FileNotFoundError as error:
            raise ConfigError(f"the model {path} does not exist: give an existing path") from error
        except (OSError, ValueError, KeyError, OverflowError, MemoryError, struct.error) as error:
            raise ConfigError(f"{path} cannot be read as a GGUF file: {error}") from error

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors by name, the fastest-varying dimension last."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """Read the tensor `name`, and dequantize it.

        Returns:
            The tensor, float32, with its shape in `tensors`.

        Raises:
            ConfigError: there is no such tensor, its type is unknown, the file is too short, or the
                package `gguf` is not installed.
        """
        gguf = optional("gguf", self.path)
        try:
            tensor = self._tensors[name]
            kind = gguf.GGMLQuantizationType(tensor.type)
            shape = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
            raw = np.frombuffer(self._map, np.uint8, int(np.prod(shape)), tensor.offset)
            found = gguf.dequantize(raw.reshape(shape), kind)
            return np.asarray(found, np.float32).reshape(tensor.shape)
        except KeyError as error:
            raise ConfigError(f"{self.path} has no tensor {name}") from error
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(f"{self.path}: tensor {name} cannot be read: {error}") from error

    def _read(self) -> None:
        if self._map[:4] != b"GGUF":
            raise ValueError("its first four bytes are not GGUF")
        self._at = 4
        version, num_tensors, num_fields = self._unpack("IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not supported")
        self.fields: dict[str, Field] = {}
        for _ in range(num_fields):
            name = self._string()
            self.fields[name] = self._value(*self._unpack("I"))
        self._tensors: dict[str, _Tensor] = {}
        for _ in range(num_tensors):
            name = self._string()
            sizes = self._unpack(f"{self._unpack('I')[0]}Q")
            self._tensors[name] = _Tensor(sizes[::-1], *self._unpack("IQ"))
        step = int(self.fields.get("general.alignment", 32))  # type: ignore[arg-type]
        start = -(-self._at // step) * step
        self._tensors = {
            name: _Tensor(tensor.shape, tensor.type, start + tensor.offset)
            for name, tensor in self._tensors.items()
        }

    def _unpack(self, form: str) -> tuple[int, ...]:
        found = struct.unpack_from("<" + form, self._map, self._at)
        self._at += struct.calcsize("<" + form)
        return found

    def _string(self) -> str:
        (size,) = self._unpack("Q")
        raw = self._map[self._at : self._at + size]
        if len(raw) < size:
            raise ValueError("the file ends within a text")
        self._at += size
        return raw.decode("utf-8", "replace")

    def _value(self, kind: int) -> Field:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack(_SCALARS[kind])[0]
        inner, count = self._unpack("IQ")
        if inner in (_STRING, _ARRAY):
            return [self._value(inner) for _ in range(count)]
        return list(self._unpack(f"{count}{_SCALARS[inner]}"))
