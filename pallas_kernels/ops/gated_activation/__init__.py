"""SwiGLU, GEGLU and ReGLU: an activated gate times a linear branch."""
