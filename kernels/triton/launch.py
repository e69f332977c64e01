"""What every launch asks of the compiler."""

# No multiplication and addition is contracted but where the code says fma: what the compiler contracts by itself
# depends on its version and on the code around, and a masked loop must round as an unmasked one does.
UNFUSED = {"enable_fp_fusion": False}
