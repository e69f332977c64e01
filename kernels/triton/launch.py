"""What every launch asks of the compiler.

Triton compiles anew for an integer that is 1 or a multiple of 16, and for a pointer to 16 bytes. Kernels name the
integers and pointers that a step changes, so that none is compiled while serving.
"""

# No multiplication and addition is contracted but where the code says fma: what the compiler contracts by itself
# depends on its version and on the code around, and a masked loop must round as an unmasked one does.
UNFUSED = {"enable_fp_fusion": False}
