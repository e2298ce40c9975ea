"""Speed, memory and accuracy of fused linear + cross entropy, ours and its peers'. See python -m benchmark --help."""
