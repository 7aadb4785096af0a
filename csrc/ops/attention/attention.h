// The variants of attention that stand in files of their own: their launchers, as attention.hip lists them.
#pragma once
#include "core/registry.h"

namespace llamac {

// cpu.hip
template <class T>
void attention_forward_cpu(View<T, 4> out, View<arithmetic<T>, 3> lse, View<const T, 4> q, View<const T, 4> k,
                           View<const T, 4> v, double scale);
template <class T>
void attention_backward_cpu(View<T, 4> dq, View<T, 4> dk, View<T, 4> dv, View<const T, 4> dout,
                            View<const T, 4> out, View<const arithmetic<T>, 3> lse, View<const T, 4> q,
                            View<const T, 4> k, View<const T, 4> v, double scale);

// naive.hip
template <class T>
void attention_forward_1(View<T, 4> out, View<float, 3> lse, View<const T, 4> q, View<const T, 4> k,
                         View<const T, 4> v, double scale, Device device);
template <class T>
void attention_backward_1(View<T, 4> dq, View<T, 4> dk, View<T, 4> dv, View<const T, 4> dout,
                          View<const T, 4> out, View<const float, 3> lse, View<const T, 4> q,
                          View<const T, 4> k, View<const T, 4> v, double scale, Device device);
int64_t attention_forward_workspace_1(const Call& call);
int64_t attention_backward_workspace_1(const Call& call);

// flash_forward.hip
void attention_forward_2(View<bf16, 4> out, View<float, 3> lse, View<const bf16, 4> q, View<const bf16, 4> k,
                         View<const bf16, 4> v, double scale, Device device);
bool flash_supports(const Call& call);

// hopper_forward.hip, where LLAMAC_WARPGROUPS
void attention_forward_3(View<bf16, 4> out, View<float, 3> lse, View<const bf16, 4> q, View<const bf16, 4> k,
                         View<const bf16, 4> v, double scale, Device device);
bool hopper_supports(const Call& call);
// hopper_backward.hip
void attention_backward_4(View<bf16, 4> dq, View<bf16, 4> dk, View<bf16, 4> dv, View<const bf16, 4> dout,
                          View<const bf16, 4> out, View<const float, 3> lse, View<const bf16, 4> q,
                          View<const bf16, 4> k, View<const bf16, 4> v, double scale, Device device);
int64_t attention_backward_workspace_4(const Call& call);
void attention_backward_5(View<bf16, 4> dq, View<bf16, 4> dk, View<bf16, 4> dv, View<const bf16, 4> dout,
                          View<const bf16, 4> out, View<const float, 3> lse, View<const bf16, 4> q,
                          View<const bf16, 4> k, View<const bf16, 4> v, double scale, Device device);
int64_t attention_backward_workspace_5(const Call& call);

// flash_backward.hip
void attention_backward_2(View<bf16, 4> dq, View<bf16, 4> dk, View<bf16, 4> dv, View<const bf16, 4> dout,
                          View<const bf16, 4> out, View<const float, 3> lse, View<const bf16, 4> q,
                          View<const bf16, 4> k, View<const bf16, 4> v, double scale, Device device);
int64_t attention_backward_workspace_2(const Call& call);
void attention_backward_3(View<bf16, 4> dq, View<bf16, 4> dk, View<bf16, 4> dv, View<const bf16, 4> dout,
                          View<const bf16, 4> out, View<const float, 3> lse, View<const bf16, 4> q,
                          View<const bf16, 4> k, View<const bf16, 4> v, double scale, Device device);
int64_t attention_backward_workspace_3(const Call& call);

}  // namespace llamac
