package main

import (
	"cmp"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/component-base/term"
)

const longHelp = `talos-ccm is a cloud controller manager for Talos Linux. It initializes Nodes from the metadata of
their Talos machines, approves the CSRs for kubelet serving certificates, deletes Nodes of machines
that are gone, and optionally allocates pod CIDRs and load balancer addresses.

Without a command, talos-ccm runs the controllers until it receives SIGTERM or SIGINT. The following
commands are read-only:

  talos-ccm config init       Print a commented configuration file to start with
  talos-ccm config validate   Validate configuration files
  talos-ccm config schema     Print the JSON schema of the configuration file
  talos-ccm render            Show what talos-ccm would write to a Node, and the rule of each value
  talos-ccm diff              Compare the Nodes of a cluster with what talos-ccm would write to them
  talos-ccm status            Show the leader, the instances, Nodes, CSRs and problems of a cluster
  talos-ccm version           Print the version
  talos-ccm completion        Print a completion script for a shell

--help-all lists all flags. Every flag can also be set by an environment variable:
TALOS_CCM_LEADER_ELECT sets --leader-elect. Flags on the command line take precedence.`

// nothingToRead explains what to do if the command is started by hand.
const nothingToRead = `talos-ccm runs as a Talos system extension, which sets --machine-socket, or as a pod with --talosconfig.
To try it without a cluster:

  talos-ccm config validate FILE                 validate a configuration
  talos-ccm render --node ADDRESS --config FILE  show what talos-ccm would write to the Node of a machine`

// maxColumns is the width of the help on wide terminals and in files.
const maxColumns = 100

func helpColumns() int {
	if columns, _, _ := term.TerminalSize(os.Stdout); columns > 0 {
		return min(columns, maxColumns)
	}

	return maxColumns
}

// help prints cobra's default help with wrapped flags. cobra can wrap flags only with a template, which would link
// text/template.
func help(cmd *cobra.Command, _ []string) {
	flags := cmd.LocalFlags()
	usage := strings.Replace(cmd.UsageString(), strings.TrimSpace(flags.FlagUsages()), strings.TrimSpace(flags.FlagUsagesWrapped(helpColumns())), 1)

	fmt.Fprintf(cmd.OutOrStdout(), "%s\n\n%s", strings.TrimSpace(cmp.Or(cmd.Long, cmd.Short)), usage)
}
