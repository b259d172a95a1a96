"""What a GPU's assembler says of a kernel when Triton compiles it, with the options that Triton gives it."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import triton
from triton import knobs

# a cache of its own: what was compiled without the hook below has no report
knobs.cache.dir = str(Path(knobs.cache.dir) / "with_reports")
knobs.nvidia.dump_ptxas_log = True


def keep_report(backend=None, stages=None, options=None, language=None, capability=None):
    """Triton's hook into its stages; called without them it names what it changes, for the cache's key."""
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


def report_of(compiled: triton.compiler.CompiledKernel) -> dict:
    """Registers of a thread, bytes spilled in stores and loads, warnings that products run one by one.

    Of an AMD GPU bytes of scratch memory, a thread's; scalars that lie in lanes of vector registers are none.
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
