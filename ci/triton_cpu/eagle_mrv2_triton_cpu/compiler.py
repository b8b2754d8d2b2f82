"""The compiler half of the backend: answers every question about itself and refuses to compile."""

from types import ModuleType, SimpleNamespace
from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget


class InterpreterBackend(BaseBackend):
    """Stands where a compiler would; kernels are interpreted and never get here."""

    binary_ext = "none"

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return f"interpreter-{self.target.arch}"

    def parse_options(self, options: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(**options)

    def add_stages(self, stages: dict[str, Any], options: object, *unused: Any) -> None:
        """Raises RuntimeError: somebody asked for machine code."""
        raise RuntimeError(
            "this environment interprets Triton kernels: TRITON_INTERPRET=1 must be set before triton is imported"
        )

    def load_dialects(self, context: Any) -> None:
        """Nothing to load."""

    def get_module_map(self) -> dict[str, ModuleType]:
        return {}
