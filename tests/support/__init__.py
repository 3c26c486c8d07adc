"""What tests share: models, loops, and the scripts that they run in processes of their own."""
