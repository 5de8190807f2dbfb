"""What part of the model a kernel belongs to, from the compiled program's text: where each instruction was written."""

import re
from typing import NamedTuple

GROUPS = ("routing", "matmuls", "attention", "other", "copies")
# Depth routing, and in the additive model the sums that stand in its place.
_ROUTING = re.compile(r"/mhar_kernels/|/mhar_jax/models/(routing|blocked|flows)\.py$")
_ATTENTION = re.compile(r"/mhar_jax/models/(attention|cache)\.py$")
_OURS = re.compile(r"/mhar_kernels/|/mhar_jax/models/")
_MATMUL_CALL = re.compile(r"gemm|cublas|matmul|onednn", re.IGNORECASE)
# Kernels whose instruction is not known.
_NAMES = (
    ("copies", re.compile(r"memcpy|memset", re.IGNORECASE)),
    ("attention", re.compile(r"sdpa|flash|fmha|attention|cudnn", re.IGNORECASE)),
    ("routing", re.compile(r"depth_route|^(merge|mix|pull|query|finish)_kernel")),
    ("matmuls", re.compile(r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|matmul|_dot_|convolution", re.IGNORECASE)),
)
_HOLDS_OTHERS = ("while", "call", "conditional", "async-start")


class Instruction(NamedTuple):
    """One of a compiled program."""

    opcode: str
    operation: str  # the primitive and what it was traced in, as "jit(f)/while/body/dot_general"; may be empty
    file: str  # of the innermost frame in a file of the model or its kernels; may be empty
    function: str
    multiplies: bool  # a matrix product, or a fusion around one

    @property
    def group(self) -> str | None:
        """One of GROUPS; None where others run inside and have the time."""
        if self.opcode in _HOLDS_OTHERS:
            return None
        if _ROUTING.search(self.file):
            return "routing"
        # The sublayer's own file holds the output projection too, a plain product; attention's are batched by vmap.
        projection = self.multiplies and "vmap" not in self.operation and self.function.endswith(".sublayer")
        if _ATTENTION.search(self.file) and not projection:
            return "attention"
        if self.multiplies:
            return "matmuls"
        return "copies" if self.opcode.startswith("copy") else "other"


class Program:
    """The instructions of one compiled program by name."""

    def __init__(self, text: str):
        """`text`: of `compiled.as_text()`."""
        self._tables = {
            name: dict(re.findall(r"^(\d+) (.+)$", body, re.MULTILINE))
            for name, body in re.findall(
                r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d+ .*\n)+)", text, re.M
            )
        }
        lines: dict[str, str] = {}
        products: dict[str, bool] = {}  # by computation
        computation = ""
        for line in text.splitlines():
            if found := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
                computation = found[1]
            elif found := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.+)$", line):
                lines[found[1]] = found[2]
                products[computation] = products.get(computation, False) or _is_product(found[2])
        self._instructions = {name: self._read(line, products) for name, line in lines.items()}
        self._by_kernel = {re.sub(r"\W", "_", name): of for name, of in self._instructions.items()}

    def group(self, kernel: str, instruction: str | None) -> str | None:
        """Of a kernel, by its instruction if that is known, else by its name, which XLA makes of the instruction's.

        None where it is itself an instruction that holds others, as traces of TPUs and CPUs list them. A kernel that a
        GPU launches as part of a graph may name the instruction that holds the graph, which says nothing.
        """
        found = self._instructions.get(instruction or "")
        if found is not None and (found.group is not None or kernel == instruction):
            return found.group
        found = self._by_kernel.get(re.sub(r"\W", "_", kernel))
        if found is not None and found.group is not None:
            return found.group
        return next((group for group, pattern in _NAMES if pattern.search(kernel)), "other")

    def _read(self, line: str, products: dict[str, bool]) -> Instruction:
        operation = re.search(r'op_name="([^"]*)"', line)
        frame = re.search(r"stack_frame_id=(\d+)", line)
        called = re.search(r"calls=%?([\w.\-]+)", line)
        multiplies = _is_product(line) or (called is not None and products.get(called[1], False))
        place = self._place(int(frame[1])) if frame else ("", "")
        return Instruction(_opcode(line), operation[1] if operation else "", *place, multiplies)

    def _place(self, frame: int) -> tuple[str, str]:
        """File and function of the innermost frame that is ours."""
        number = lambda text, name: int(re.findall(rf"{name}=(\d+)", text)[0])
        while (text := self._tables.get("StackFrames", {}).get(str(frame))) is not None:
            location = self._tables["FileLocations"][str(number(text, "file_location_id"))]
            file = self._tables["FileNames"][str(number(location, "file_name_id"))].strip('"')
            if _OURS.search(file):
                return file, self._tables["FunctionNames"][str(number(location, "function_name_id"))].strip('"')
            parent = number(text, "parent_frame_id") - 1  # 0 is none, and the text adds 1
            if parent >= frame:
                break
            frame = parent
        return "", ""


def _opcode(line: str) -> str:
    found = re.search(r" ([a-z][a-z0-9\-]*)\(", line)
    return found[1] if found else ""


def _is_product(line: str) -> bool:
    opcode = _opcode(line)
    target = re.search(r'custom_call_target="([^"]*)"', line)
    return opcode in ("dot", "convolution", "ragged-dot") or bool(target and _MATMUL_CALL.search(target[1]))
