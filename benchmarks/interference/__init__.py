"""`kvrelay bench interference`: what running streams feel of long prompts, in two tiers and in one."""
