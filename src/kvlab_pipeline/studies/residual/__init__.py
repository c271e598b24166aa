"""The codec's own error, on the tensors that each engine captured."""
