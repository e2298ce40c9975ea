"""An interpreter of the PTX of our kernels, on a CPU. README.md says what it models, what not, and how it is used."""
