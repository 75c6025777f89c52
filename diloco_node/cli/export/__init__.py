"""`diloco-node export`: the merged model as a folder that `from_pretrained` loads."""
