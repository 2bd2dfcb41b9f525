// What a kernel needs to call another one.
#pragma once

#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {

// All that a kernel may ask its context for is the outer one's, but for what belongs to a node of a
// graph: its frame of a function call, its stack trace.
inline void FillParams(tensorflow::OpKernelContext* outer,
                       tensorflow::OpKernelContext::Params* params) {
  params->step_id = outer->step_id();
  params->start_time_usecs = outer->start_time_usecs();
  params->deadline = outer->deadline();
  params->device = outer->device();
  params->resource_manager = outer->resource_manager();
  params->step_container = outer->step_container();
  params->rendezvous = outer->rendezvous();
  params->collective_executor = outer->collective_executor();
  params->session_config = outer->session_config();
  params->session_state = outer->session_state();
  params->session_metadata = outer->session_metadata();
  params->tensor_store = outer->tensor_store();
  params->cancellation_manager = outer->cancellation_manager();
  params->op_device_context = outer->op_device_context();
  params->frame_iter = outer->frame_iter();
  params->function_library = outer->function_library();
  params->runner = outer->runner();
  params->slice_reader_cache = outer->slice_reader_cache();
  params->run_all_kernels_inline = outer->run_all_kernels_inline();
}

}  // namespace tfmem
