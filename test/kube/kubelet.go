package kube

const kubelet = "kubelet"

// Kubelet is a running kubelet.
type Kubelet struct {
	process *process
}
