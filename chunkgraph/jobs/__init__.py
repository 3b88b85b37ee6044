"""Processes of a job: started, followed, and explained when one fails. No Megatron here."""
