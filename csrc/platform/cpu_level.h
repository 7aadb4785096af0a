// Instruction sets of x86-64 for which one program has its operations. A build with LLAMAC_NATIVE=OFF compiles the sources of
// the operations once per level, and the processor that runs it determines which of them register themselves.
//
//   baseline   SSE2, every x86-64
//   v3         AVX2 and FMA: x86-64-v3 of the psABI
//   v4         AVX-512 F, BW, CD, DQ, VL: x86-64-v4
//
// levels.cmake links the objects of a level into one, in which every symbol is local. Otherwise the linker would keep one
// copy of a template or an inline function that two levels have, and an older processor could meet AVX-512 in it.
#pragma once
namespace llamac {

// The level of this process: the best of the processor, or that of the environment variable LLAMAC_CPU_LEVEL. Empty if the
// program has one level. Throws Error for a level that the program or the processor lacks.
const char* cpu_level();

// Constructs the operations of that level, which register themselves. To be called once.
void start_cpu_level();

}  // namespace llamac
