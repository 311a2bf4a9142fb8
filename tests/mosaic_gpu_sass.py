"""Finds tensor core instructions whose left operand lies in registers that nothing wrote, in a kernel's machine code.

ptxas of CUDA 12.8 to 13.2 can lose a constant fragment of a wgmma operand in registers; the kernel then multiplies
whatever the register held. The kernels build such operands from loaded values to keep clear of it.

    ptxas -arch=sm_90a kernel.ptx -o kernel.cubin && nvdisasm -c kernel.cubin > kernel.sass
"""

import re
import subprocess
from pathlib import Path

from absent import tool

_PRODUCT = re.compile(r"HGMMA\.(\d+)x(\d+)x\d+\S* (R\d+), (R\d+), gdesc")
_WRITE = re.compile(r"^\s*(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P\d+ )?([A-Z0-9_.]+)\s+(?:P\d+, )?R(\d+)\b")


def unwritten(text: str) -> list[tuple[int, list[str]]]:
    """Lines of ``text`` (SASS) with such an instruction, and the registers.

    Text order only: a register first written further down in a loop's body would show up as a false alarm.
    """
    written: set[int] = set()
    bad = []
    for number, line in enumerate(text.splitlines(), 1):
        if found := _PRODUCT.search(line):
            start, target = int(found[4][1:]), int(found[3][1:])
            if missing := [f"R{r}" for r in range(start, start + 4) if r not in written]:
                bad.append((number, missing))
            written.update(range(target, target + int(found[2]) // 2))
        elif (found := _WRITE.match(line)) and not found[1].startswith(("ST", "BAR", "RED")):
            name, first = found[1], int(found[2])
            wide = 4 if ".128" in name or (name.startswith("LDSM") and ".4" in name) else 1
            wide = 2 if wide == 1 and (".64" in name or "WIDE" in name) else wide
            written.update(range(first, first + wide))
    return bad


def lost_registers(folder: Path) -> dict[str, list[tuple[int, list[str]]]]:
    """What :func:`unwritten` finds in each kernel whose PTX lies in ``folder``, by its name.

    Needs ``ptxas`` and ``nvdisasm``.
    """
    found = {}
    for ptx in sorted(folder.glob("*.ptx")):
        binary = ptx.with_suffix(".cubin")
        subprocess.run([str(tool("ptxas")), "-arch=sm_90a", str(ptx), "-o", str(binary)], check=True)
        code = subprocess.run([str(tool("nvdisasm")), "-c", str(binary)], check=True, capture_output=True, text=True)
        assert "HGMMA" in code.stdout, f"{ptx.name}: no tensor core instruction"
        found[ptx.stem] = unwritten(code.stdout)
    return found


def complaints(folder: Path) -> list[str]:
    """What ``ptxas`` says of lost performance (products that wait for each other, most of all) of the PTX in
    ``folder``.
    """
    found = []
    for ptx in sorted(folder.glob("*.ptx")):
        command = [str(tool("ptxas")), "-v", "-arch=sm_90a", str(ptx), "-o", str(ptx.with_suffix(".cubin"))]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found += [line for line in done.stderr.splitlines() if "Performance Loss" in line]
    return found
