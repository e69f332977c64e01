"""Triton's interpreter and its compiler cannot share a process: each has a folder, collected in one of its own."""

from __future__ import annotations

import os

# The folder that this process is for; test_triton_jobs.py starts them.
JOB = os.environ.get("KERNEL_JOB")
collect_ignore = [folder for folder in ("interpreted", "compiled") if folder != JOB]
