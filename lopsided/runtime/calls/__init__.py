"""What a call of the parallel module takes and gives: signatures, programs, batches, outputs, any shape."""
