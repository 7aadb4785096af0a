// The variants of attention that stand in files of their own: their launchers, as attention.hip lists them.
#pragma once
#include "core/operation.h"

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
void attention_forward_naive(View<T, 4> out, View<float, 3> lse, View<const T, 4> q, View<const T, 4> k,
                             View<const T, 4> v, double scale, LaunchContext context);
template <class T>
void attention_backward_naive(View<T, 4> dq, View<T, 4> dk, View<T, 4> dv, View<const T, 4> dout,
                              View<const T, 4> out, View<const float, 3> lse, View<const T, 4> q,
                              View<const T, 4> k, View<const T, 4> v, double scale, LaunchContext context);
int64_t attention_forward_naive_workspace(const Call& call);
int64_t attention_backward_naive_workspace(const Call& call);

using ForwardLauncher = void(View<bf16, 4> out, View<float, 3> lse, View<const bf16, 4> q,
                             View<const bf16, 4> k, View<const bf16, 4> v, double scale,
                             LaunchContext context);
using BackwardLauncher = void(View<bf16, 4> dq, View<bf16, 4> dk, View<bf16, 4> dv, View<const bf16, 4> dout,
                              View<const bf16, 4> out, View<const float, 3> lse, View<const bf16, 4> q,
                              View<const bf16, 4> k, View<const bf16, 4> v, double scale,
                              LaunchContext context);
using WorkspaceBytes = int64_t(const Call& call);

// flash_forward.hip, flash_backward.hip
bool flash_supports(const Call& call);
ForwardLauncher attention_forward_flash;
BackwardLauncher attention_backward_flash, attention_backward_flash_atomic;
WorkspaceBytes attention_backward_flash_workspace, attention_backward_flash_atomic_workspace;

// wgmma_forward.hip, wgmma_backward.hip; where LLAMAC_WARPGROUPS
bool wgmma_supports(const Call& call);
ForwardLauncher attention_forward_wgmma;
BackwardLauncher attention_backward_wgmma, attention_backward_wgmma_atomic;
WorkspaceBytes attention_backward_wgmma_workspace, attention_backward_wgmma_atomic_workspace;

}  // namespace llamac
