"""What a GPU's assembler reports about a kernel when Triton compiles it, with the options Triton gives it."""

import re
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from tests.compile_record import compiled_once

# a separate cache: what was compiled without the hook below has no report
knobs.cache.dir = str(Path(knobs.cache.dir) / "with_reports")
knobs.nvidia.dump_ptxas_log = True


def keep_report(backend=None, stages=None, options=None, language=None, capability=None):
    """A hook into Triton's stages; called without stages it names its change, for the cache key."""
    if stages is None:
        return "with report", "with report"
    if "cubin" not in stages:
        return None
    assemble = stages["cubin"]

    def assemble_and_keep(ptx, metadata):
        with redirect_stdout(StringIO()) as report:
            binary = assemble(ptx, metadata)
        metadata["report"] = report.getvalue()
        return binary

    stages["cubin"] = assemble_and_keep
    return None


knobs.runtime.add_stages_inspection_hook = keep_report


def report_of(compiled: CompiledKernel) -> dict:
    """Registers of a thread, bytes spilled in stores and loads, warnings that matrix products are serialized.

    For an AMD GPU `spilled` is a thread's scratch memory in bytes; it does not count scalars that are kept in
    lanes of vector registers.
    """
    if "amdgcn" in compiled.asm:
        code = compiled.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count: +(\d+)", code)[1])
        scratch = int(re.search(r"\.private_segment_fixed_size: +(\d+)", code)[1])
        return {"registers": registers, "spilled": scratch, "warnings": []}
    report = compiled.metadata.report
    return {
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),
        "spilled": sum(int(x) for x in re.findall(r"(\d+) bytes spill", report)),
        "warnings": re.findall(r".*C75\d\d.*", report),
    }


def machine_code_of(compiled: CompiledKernel) -> dict:
    """What the assembler reports about a kernel, and what the kernel's machine code shows."""
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(compiled.asm["cubin"])
        binary.flush()
        # -ndf: no analysis of where indirect branches lead
        command = [disassembler, "-ndf", "-c", binary.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return report_of(compiled) | {
        "hgmma": code.count("HGMMA"),
        "overwritten": overwritten_operands(code),
    }


def overwritten_operands(code: str) -> list[str]:
    """Matrix products of innermost loops whose left operand, in registers, is written only after them.

    Such an operand is carried from one iteration to the next, as P is in the forward kernel, or it is a
    constant of the loop whose registers the assembler has reused too early: then the product is wrong from
    the second iteration on.
    """
    found = []
    for loop in innermost_loops(code):
        written = [written_registers(text) for text in loop]
        for place, text in enumerate(loop):
            if product := re.match(r"HGMMA\S* R\d+, R(\d+), gdesc", text):
                operand = set(range(int(product[1]), int(product[1]) + 4))
                if any(operand & w for w in written) and not any(operand & w for w in written[:place]):
                    found.append(text)
    return found


def innermost_loops(code: str) -> list[list[str]]:
    """The instructions of each loop that contains no other."""
    labels, instructions = {}, []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        if instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?(.*?)\s*;", line):
            instructions.append(instruction[1])
    jumps = ((re.match(r"BRA\b.*?(\.L_x_\d+)", text), end) for end, text in enumerate(instructions))
    loops = [(labels[jump[1]], end) for jump, end in jumps if jump and labels.get(jump[1], end + 1) <= end]
    return [
        instructions[begin : end + 1]
        for begin, end in loops
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in loops)
    ]


def written_registers(instruction: str) -> set[int]:
    """The registers that an instruction writes, if it is one of those that make a left operand."""
    match = re.match(
        r"(F2FP|FMUL|FADD|FFMA|MUFU|MOV|IMAD|LDS|LDSM|SEL|FSEL|PRMT|LOP3|HMNMX2)\b(\S*) R(\d+)", instruction
    )
    if not match:
        return set()
    width = {".128": 4, ".16.M88.4": 4, ".64": 2}.get(match[2], 1)
    return set(range(int(match[3]), int(match[3]) + width))


def used_by(
    source: ASTSource, target: GPUTarget, options: dict, report: Callable[[CompiledKernel], dict] = report_of
) -> dict:
    """A kernel's shared memory and what `report` gives for it; from the record if nothing has changed."""

    def make() -> dict:
        compiled = triton.compile(source, target=target, options=options)
        return {"shared": compiled.metadata.shared} | report(compiled)

    given = [source.signature, sorted(source.constants.items(), key=str), source.attrs, target, options]
    name = f"{source.fn.__module__}.{source.fn.__name__} {target.backend} {target.arch}"
    code = [f"{code.__module__}:{code.__name__}" for code in (source.fn, report, keep_report)]
    return compiled_once(f"triton_{triton.__version__}", name, repr(given), code, make)
