"""The options of a quantizer as one immutable value, shared by the quantizer and the tensors that it makes."""

from functools import lru_cache
from typing import Any, NamedTuple

from ._native import _C
from .dtype import DType

# What the native quantizer and the operators know; the rest concerns Python only.
OPTIONS = (
    "rowwise",
    "columnwise",
    "with_rht",
    "with_random_sign_mask",
    "with_2d_quantization",
    "stochastic_rounding",
    "row_scaled_nvfp4",
    "nvfp4_use_4over6",
    "nvfp4_e4m3_max",
    "nvfp4_4over6_err_mode",
    "optimize_for_gemm",
    "schedule",
)


class Settings(NamedTuple):
    """Everything that can be chosen about a quantization, hashable and picklable (unless it names a process group).

    A tuple of plain values: torch.compile guards on each of them and writes them into its graphs without further help.
    """

    rowwise: bool = True
    columnwise: bool = True
    with_rht: bool = False
    with_random_sign_mask: bool = True
    with_2d_quantization: bool = False
    stochastic_rounding: bool = False
    row_scaled_nvfp4: bool = False
    nvfp4_use_4over6: bool = False
    nvfp4_e4m3_max: int = 448
    nvfp4_4over6_err_mode: str = "MAE"
    optimize_for_gemm: bool = False
    schedule: str = "auto"
    fp4_dtype: DType = DType.kFloat4E2M1
    with_post_rht_amax: bool = False
    with_amax_reduction: bool = False
    amax_reduction_group: Any = None
    internal: bool = False

    def plain(self) -> tuple:
        """The tuple of values in which torch.compile carries settings. NotImplementedError with an amax reduction."""
        if self.with_amax_reduction:
            raise NotImplementedError("with_amax_reduction=True is not supported in a compiled function")
        return tuple(self._replace(amax_reduction_group=None))

    @classmethod
    def from_plain(cls, values: tuple) -> "Settings":
        """The inverse of `plain`; on the way torch 2.11 makes the enum an int."""
        settings = cls._make(values)
        return settings._replace(fp4_dtype=DType(settings.fp4_dtype))

    def options(self) -> dict[str, Any]:
        """The keywords of the native quantizer and of the operators."""
        return {name: getattr(self, name) for name in OPTIONS}

    def native(self):
        """The native quantizer with these options, which checks them: ValueError where they exclude each other."""
        return _native(*self[: len(OPTIONS)])

    def of_tensor(self) -> "Settings":
        """The settings that a tensor keeps: what its bytes depend on, and `internal`.

        Without the reduction, so that updating it later enters no collective.
        """
        if not self.with_amax_reduction and self.amax_reduction_group is None and self.schedule == "auto":
            return self
        return self._replace(with_amax_reduction=False, amax_reduction_group=None, schedule="auto")

    def check(self) -> "Settings":
        """Returns itself with the error mode in upper case; TypeError or ValueError for what is not allowed."""
        for name, default in zip(Settings._fields, _DEFAULTS, strict=True):
            value = getattr(self, name)
            if name != "amax_reduction_group" and type(value) is not type(default):
                raise TypeError(f"{name} must be of type {type(default).__name__}, got {value!r}")
        if self.fp4_dtype is not DType.kFloat4E2M1:
            raise TypeError(f"fp4_dtype must be DType.kFloat4E2M1, got DType.{self.fp4_dtype.name}")
        if self.row_scaled_nvfp4 and self.with_amax_reduction:
            raise ValueError("with_amax_reduction=True: not together with row_scaled_nvfp4=True")
        checked = self._replace(nvfp4_4over6_err_mode=self.nvfp4_4over6_err_mode.upper())
        checked.native()
        return checked

    def __hash__(self):
        if self.amax_reduction_group is not None:
            raise TypeError("settings with an amax_reduction_group are not hashable")
        return tuple.__hash__(self)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        arguments = ", ".join(
            f"{name}=DType.{value.name}" if isinstance(value, DType) else f"{name}={value!r}"
            for name, value in zip(self._fields, self, strict=True)
        )
        return f"Settings({arguments})", {"Settings": Settings, "DType": DType}

    def __reduce__(self):
        return settings_from_dict, (self._asdict(),)


_DEFAULTS = tuple(Settings._field_defaults.values())


def settings_from_dict(fields: dict[str, Any]) -> Settings:
    """Rebuilds pickled settings by name, so that files outlive the order of the fields."""
    return Settings(**fields)


@lru_cache(maxsize=1024)
def _native(*values):
    return _C.NVFP4Quantizer(**dict(zip(OPTIONS, values, strict=True)))
