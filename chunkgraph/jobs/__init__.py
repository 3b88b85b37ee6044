"""Start the processes of a job, follow them, and explain failures. No Megatron here."""
