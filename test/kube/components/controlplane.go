//go:build !node

package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
)

// components maps a component's name to its main, which returns the exit code and finds its arguments in os.Args.
var components = map[string]func() int{
	"etcd":                    runEtcd,
	"kube-apiserver":          func() int { return cli.Run(apiserver.NewAPIServerCommand()) },
	"kube-controller-manager": func() int { return cli.Run(controllermanager.NewControllerManagerCommand()) },
}

// runEtcd returns only when etcd was asked to end; on an error etcd ends the process itself.
func runEtcd() int {
	etcdmain.Main(os.Args)

	return 0
}
