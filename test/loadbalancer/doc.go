// Package loadbalancer tests the load balancer addresses of Services with real kube-proxies, and podCIDRs with Talos's default
// network: Flannel and kube-proxy. Nodes and a client run in separate network namespaces; machines, kubelets and CNI plugins
// are played. The tests require root; run them with `make e2e` and `make flannel-test`.
package loadbalancer
