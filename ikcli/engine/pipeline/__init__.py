"""Pipeline parallelism: stages of consecutive layers in several processes, which pass activations over TCP."""
