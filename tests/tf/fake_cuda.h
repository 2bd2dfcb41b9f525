// What stream_order.cc asks of the fake CUDA driver.
#ifndef TFMEM_TESTS_TF_FAKE_CUDA_H_
#define TFMEM_TESTS_TF_FAKE_CUDA_H_

#include <algorithm>
#include <functional>
#include <vector>

void* FakeNewStream();
// Enqueues a kernel.
void FakeLaunch(void* stream, std::function<void()> kernel);
// Runs the head of a random stream that can go on; false if there is none.
bool FakeRunOne();
void FakeSeed(unsigned seed);

struct FakeViolations {
  int no_context = 0;  // calls that need a current context and had none
  int host_waits = 0;  // calls that block the host
};
const FakeViolations& fake_violations();

#endif  // TFMEM_TESTS_TF_FAKE_CUDA_H_
