"""Tasks, one file each; configs/task names them."""
