// One kernel for several graphs: for ops that keep a state in their kernel, as random ops do.
//
// TensorFlow makes new kernels for each graph, so a random op restarts its stream where a step
// goes on with another graph. An op "TfmemSharedX" has the signature of "X" and two more
// attributes: `tfmem_stream`, which this process opened, and `tfmem_draw`, the op's place in the
// step. Its kernel runs X's own kernel, which it shares with the ops of that stream and place in
// every graph. The stream lives as long as any kernel in it, as the state of X does.
#pragma once

#include <cstdint>
#include <string>

namespace tfmem {

// Registers "TfmemShared" + `op`, unless it is already. False if `op` is none that may share a
// kernel: it has to be stateful, with seeds, or one that reads on, and must not take or give
// handles to what lives outside its kernel.
bool ShareOp(const std::string& op);

// A stream that no graph can name unless it was told: the number is drawn at random.
int64_t OpenStream();

// No kernel that is made from now on finds the stream.
void CloseStream(int64_t stream);

}  // namespace tfmem
