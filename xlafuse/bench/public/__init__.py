"""Public models as their authors publish them, and the benchmark of them: `xlafuse bench public`."""
