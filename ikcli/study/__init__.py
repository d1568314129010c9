"""What types cost the tensors of a model: error tables, calibration, studies of the resident model."""
