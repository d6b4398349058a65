"""How a replica is made: what each stack needs so that its gradients can be reduced by the job."""
