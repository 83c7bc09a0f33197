"""Starts SGLang's own server on a CPU; run by the interpreter of the environment that launch/sglang_cpu.sh makes.

Before SGLang is imported, two operators of torchvision's CUDA build get an empty schema, without which its import
fails on a CPU. That stands outside the main guard, because the server's child processes import this file and SGLang
too. Every argument is handed on to SGLang.
"""

import sys

import torch

_OPERATORS = torch.library.Library("torchvision", "DEF")  # must live as long as the process
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
