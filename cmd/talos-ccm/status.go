package main

import (
	"context"
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/talos-ccm/talos-ccm/pkg/preview"
	"github.com/talos-ccm/talos-ccm/pkg/status"
)

// statusTimeout limits the time to read the cluster.
const statusTimeout = time.Minute

// exitAttention is the exit code of the status command if something needs attention.
const exitAttention = 2

// errAttention is the result of the status command if something needs attention. It has no message.
var errAttention = errors.New("something needs attention")

func newStatusCommand() *cobra.Command {
	var (
		kube   kubeFlags
		output string
	)

	cmd := &cobra.Command{
		Use:                   "status [flags]",
		Short:                 "Show the leader, the instances, Nodes, CSRs and problems of a cluster",
		DisableFlagsInUseLine: true,
		Long: `Show the leader, the versions and configurations of the instances, the number of Nodes and pending
CSRs, and what needs attention, the worst first. The command needs only a kubeconfig and writes
nothing.

Problems are those that Nodes, CSRs and the lease show, and the warnings in talos-ccm's Events. The API
server keeps an Event for an hour: some of them may be solved already. Every kubelet can write, change
and delete Events, but not the lease and the labels of the instances.

The exit code is 0 if nothing needs attention, 1 if the command failed, and 2 otherwise.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, client, err := kube.connect()
			if err != nil {
				return err
			}

			namespace, name, err := leaseKey()
			if err != nil {
				return err
			}

			ctx, cancel := context.WithTimeout(cmd.Context(), statusTimeout)
			defer cancel()

			report, err := status.Read(ctx, client, namespace, name)
			if err != nil {
				return err
			}

			if err := preview.Write(cmd.OutOrStdout(), output, report); err != nil {
				return err
			}

			if len(report.Problems) > 0 {
				return errAttention
			}

			return nil
		},
	}

	kube.add(cmd.Flags())
	addChoice(cmd, &output, "output", "o", "Output format", preview.Formats()...)

	return cmd
}
