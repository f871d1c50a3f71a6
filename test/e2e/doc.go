// Package e2e tests talos-ccm as a system extension on two real Talos machines with real kubelets (see test/talos). The
// tests require root and the build tag e2e. With the tag ha, there are three control-plane machines.
package e2e
