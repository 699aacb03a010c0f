"""Parts of `benchmarks/slow_link.py`: two network namespaces with a long, narrow link, an S3 server, and a run over them."""
