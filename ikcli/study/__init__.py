"""Measure what quantization types cost the tensors of a model: error tables, calibration, studies."""
